"""Integrations: other libraries' interfaces on top of zerofx, imported only by their users."""
