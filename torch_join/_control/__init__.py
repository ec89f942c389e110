"""Small messages between ranks, without tensors: which ranks are alive, what comes next, which rank has failed.

Start reading at `channel.py`. `_links/` has the connections that carry the messages. Until these exist, `set_up.py`
sends messages over the process group. `codec.py` defines what a message may contain: data from another process is
never unpickled.
"""
