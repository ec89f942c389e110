"""These tests run where Ray Train is installed, which is in an environment of its own: see CONTRIBUTING.md."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
