"""A recipe while it is edited: its text, its fields, what is wrong with it.

In: text and changes of fields.
Out: new text, which keeps comments; the form's state.
Imported by: `runs`, `tabs`.
"""
