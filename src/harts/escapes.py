"""Text from data as a terminal may show it: control and bidirectional characters become escapes."""

__all__ = ["escaped"]


def escaped(text: str, keep: str = "") -> str:
    """The text with every character that a terminal would obey, or not show, written as a Python escape.

    Args:
        text: an id, the name of a group, a message with a name from data in it.
        keep: characters that stay as they are, such as a line's end.
    """
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )
