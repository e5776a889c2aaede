"""Kills and freezes processes of an engine under load, and checks that no request changes."""
