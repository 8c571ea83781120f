"""``python -m tw_reduce.doctor``."""

import sys

from tw_reduce.doctor import main

if __name__ == "__main__":
    sys.exit(main())
