"""The protocol of one ext_proc stream between gateway and picker: its events, its phases and its
answers.
"""
