"""The sharded parameter as users see it."""
