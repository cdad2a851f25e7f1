"""What people look at: tables, lanes over time, the page, and their JSON twins."""
