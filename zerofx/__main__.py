"""`python -m zerofx ...`: the command line."""

from zerofx.cli import main

if __name__ == "__main__":
    main()
