"""Images and videos: what rows and tools give, put into token ids and into the forward pass of a model.

rows.py, sources.py   the media of a row: found in columns and messages; files, contents, Pillow images
placing.py            as many tokens as stand for each
films.py              videos as files: times and frames (PyAV)
pictures.py           images in files (Pillow)
video_settings.py     which frames of a video, at which size, with which values
pixels.py             pictures into the patches that a vision tower takes, with the model's image processor
inputs.py             patches and positions as arguments of the forward pass
probe.py              a loaded model on packed prompts with images, compared with its own forward pass
"""
