from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["*"]  # which needs Python 3.11
