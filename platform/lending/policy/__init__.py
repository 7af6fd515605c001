"""How much is lent, where requests lie, how operators are sliced. Pure."""
