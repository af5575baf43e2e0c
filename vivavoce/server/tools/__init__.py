"""Tools that the server has itself: an operator switches them on, and every conversation may call them."""
