"""Small messages between ranks, without tensors: who is there, what comes next, who has failed.

Begin with: `channel.py`. `_links/` has the connections that it goes over, `set_up.py` what ranks tell each other over
their process group until these are made.
`codec.py` says what may be in a message: nothing that comes from another process is unpickled.
"""
