"""Every record that crosses a process border, as frozen dataclasses.

Ray pickles them as they are. Where vLLM's RPC or JSON needs a dict, the sender makes it at that border and the receiver
turns it back (`to_dict`, `from_dict`), so that no other code sees one.
"""
