"""Programs: graphs, the meaning of their nodes, their text, and their proof."""
