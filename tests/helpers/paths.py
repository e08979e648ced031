"""Where things stand in this checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
