"""`python -m benchmarks.zoo`."""

from benchmarks.zoo.run import main

main()
