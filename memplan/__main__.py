"""``python -m memplan``: the command line."""

from memplan.cli.start import main

if __name__ == "__main__":
    main()
