"""`python -m spectune` is the command `spectune`."""

from spectune.cli.app import main

if __name__ == "__main__":
    main()
