"""Ctrl-C in tests, wherever they are started.

A shell has the background jobs of a script ignore SIGINT, and all that these start
inherits it; a handled signal is at its default in a program that a test starts.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
