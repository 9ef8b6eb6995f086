"""Pictures of a prefix tree: for the terminal (`draw_tree`) and as one self-contained HTML page (`render_page`)."""

from harts.viz.page import render_page, write_page
from harts.viz.text import draw_tree

__all__ = ["draw_tree", "render_page", "write_page"]
