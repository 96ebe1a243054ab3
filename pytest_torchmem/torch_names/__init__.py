"""torch's names for what is here, for programs that drove torch's own analysis.

Each module has the name of one of torch's and gives what that one gives, from our columns.
"""
