"""How replicas make a step together: what they share on the servers, and who does what.

Built into the graph once: a step runs no Python from here.
"""
