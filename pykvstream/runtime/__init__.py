"""What decides and what runs: arena layouts, placement policy, admission, and the session above them.

Order: layout (sizes) < policy (decisions) and admission (refusals); these three are pure and import no native
code.
"""
