"""Engines: in process and over HTTP, behind one protocol."""
