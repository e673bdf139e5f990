"""How far a page was turned when it was scanned, and the page turned back."""
