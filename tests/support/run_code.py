"""A module to start: runs the code that is its first argument."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
