"""Small messages between ranks, without tensors: who is there, what comes next, who has failed.

May import: `_base`.
Begin with: `channel.py`, the interface; `store_channel.py` is what it is made of, over the job's `TCPStore`.
`codec.py` says what may be in a message: nothing that comes from the store is unpickled.
"""
