"""A local web page over run folders: `strop view`.

answers.py        Responses to the page's requests, as plain values; every text in them is made harmless
catalog.py        The runs that the page shows
one_file.py       A run, or several, as one HTML file
sample_search.py  Samples by what they are
server.py         The page's addresses, who may ask, and in which form answers go out
timeline_rows.py  The timeline of a profiled step as rows of bars
texts.py          Tokens of a run as texts, without loading a library of models where its tokenizer is one file
"""
