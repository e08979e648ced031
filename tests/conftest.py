"""Settings of the whole suite."""

from hypothesis import settings

# Every run tries the same examples: a failure is a change's fault, never chance.
settings.register_profile("memplan", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("memplan")
