"""`python -m zerofx ...`: the command line."""

from zerofx.tools.cli import main

if __name__ == "__main__":
    main()
