"""Order of the folders in the site of these pages. mkdocs.yml names this file as a hook."""

TITLES = {
    "Start": "Start",
    "How to": "How to",
    "Migrate": "Migrate",
    "Reference": "Reference",
    "Measurements": "Measurements",
}
TITLES |= {"Extending": "Extending", "Adr": "Decisions"}


def on_nav(nav, config, files):
    """Sort folders by the order of TITLES, after the first page, and rename them."""
    order = list(TITLES)
    nav.items.sort(key=lambda item: order.index(item.title) if item.is_section else -1)
    for item in nav.items:
        if item.is_section:
            item.title = TITLES[item.title]
    return nav
