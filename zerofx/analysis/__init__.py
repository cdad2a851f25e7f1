"""Facts about a finished program, and the choices that follow from them. Nothing is rewritten."""
