"""The command line."""

# The exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130
