"""Plans and machines as HTML.

In: a recipe's config, a machine description.
Out: panels of the page. No torch, no device.
Imported by: `recipes`, `tabs`.
"""
