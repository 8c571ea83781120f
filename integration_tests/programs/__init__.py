"""What tests start in processes of their own, and compare with one device."""
