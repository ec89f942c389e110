"""Small messages between ranks, without tensors: who is there, what comes next, who has failed.

May import: `_base`.
Begin with: `channel.py`, the interface; `_links/tree_channel.py` is what it is made of, over connections between the
ranks, and `store_channel.py` over the job's `TCPStore`, by which these are made, and which serves where they cannot be.
`codec.py` says what may be in a message: nothing that comes from the store is unpickled.
"""
