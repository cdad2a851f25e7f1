"""What a program is: graphs, what their nodes stand for, its text, and its proof."""
