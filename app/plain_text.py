"""Text that Streamlit shows as text: model output, names and committed pages hold markup that no page may follow."""

import re


def plain(text: str) -> str:
    """Return text that Streamlit's Markdown shows as it is: no markup, directive, formula or link."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text.replace("\n", " "))


INTERVAL = re.compile(r"-?[\d.,]+(?: %)? \([^()\n|]{1,24}\)")


def prose(markdown: str) -> str:
    """Return Markdown as it reads below the headings of a page: no picture, link, formula or directive of Streamlit's.

    A number and its interval stay on one line.
    """
    text = re.sub(r"!\[[^]]*]\([^)]*\)|\[([^]]*)]\([^)]*\)", lambda found: found[1] or "", markdown)
    text = re.sub(r"^(#+) ", r"##\1 ", text, flags=re.MULTILINE)
    text = INTERVAL.sub(lambda found: found[0].replace(" ", "\u00a0").replace("–", "\u2060–\u2060"), text)
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else re.sub(r"([$<]|:(?=\w))", r"\\\1", part) for part in parts)
