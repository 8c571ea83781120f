"""How a process joins the others: its launcher, its seat, the group."""
