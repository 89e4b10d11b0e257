"""Who may use the page: same origin, limits before the password, the sign-in page.

In: requests.
Out: requests that may pass, or a refusal.
Imported by: `server`.
"""
