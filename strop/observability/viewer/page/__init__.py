"""A local web page over run folders: `strop view`.

view.py        the command
server.py         addresses, who may ask, and in which form answers go out
catalog.py        the runs that are shown, as they grow
answers.py        what the page asks for, as plain values
sample_search.py  samples by what they are, newest first, a little at a time
one_file.py       a run as one HTML file
static/           the page itself: no build step, nothing from elsewhere but plotly's script from its package
"""
