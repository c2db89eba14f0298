"""Runs in commands: can TLT run here, and what does a real engine on this machine show."""
