"""Who is active at which step, and what happens from the first rank that joins to the last.

May import: `_base`, `_control`, `_schedule`, `_shadow`, `_collectives`, `_handover`, `joinables`.
Begin with: `server.py`.
"""
