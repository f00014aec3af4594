"""The directive ``{gallery}``: a table of contents that shows a card for each notebook.

Its lines are those of ``{toctree}``. A card has the last picture that the notebook drew when it was
executed, the notebook's title, and its first paragraph.
"""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree


class gallery(nodes.General, nodes.Element):  # noqa: N801 - a node of docutils is named in lower case
    """Stands for the cards until all notebooks have been read; ``notebooks`` are their names."""


class Gallery(TocTree):
    """A hidden table of contents, and a place for the cards."""

    def run(self) -> list[nodes.Node]:
        """Read the lines as a table of contents does."""
        self.options["hidden"] = None
        (contents,) = super().run()
        (entries,) = contents.findall(addnodes.toctree)
        notebooks = entries["includefiles"]
        for notebook in notebooks:
            # a card changes with its notebook, so this page is built again
            self.env.note_dependency(self.env.doc2path(notebook))
        return [contents, gallery("", notebooks=notebooks)]


def draw_cards(app: Sphinx, page: nodes.document, name: str) -> None:
    """Put the cards where the directive stands."""
    for place in list(page.findall(gallery)):
        cards = [draw_card(app, notebook, name) for notebook in place["notebooks"]]
        place.replace_self(nodes.bullet_list("", *cards, classes=["gallery"]))


def draw_card(app: Sphinx, notebook: str, page: str) -> nodes.list_item:
    """Return the card of a notebook, for a page."""
    document = app.env.get_doctree(notebook)
    link = {"refuri": app.builder.get_relative_uri(page, notebook), "internal": True}
    shown: list[nodes.Node] = []
    pictures = list(document.findall(nodes.image))
    if pictures:
        picture = pictures[-1].deepcopy()
        picture.attributes |= {"alt": "", "classes": ["thumbnail"]}  # the title says it to readers
        shown.append(nodes.paragraph("", "", nodes.reference("", "", picture, **link)))
    title = app.env.titles[notebook].astext()
    shown.append(nodes.paragraph("", "", nodes.reference("", title, **link), classes=["title"]))
    first = next(iter(document.findall(nodes.paragraph)), None)
    if first is not None:
        shown.append(nodes.paragraph("", first.astext()))
    return nodes.list_item("", *shown)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_node(gallery)
    app.add_directive("gallery", Gallery)
    app.connect("doctree-resolved", draw_cards)
    app.add_css_file("gallery.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
