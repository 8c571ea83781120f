"""``python -m tw_doctor``."""

import sys

from tw_doctor import main

if __name__ == "__main__":
    sys.exit(main())
