"""Images and videos: what rows and tools give, put into token ids and into the forward pass of a model.

media_rows.py, sources.py   the media of a row: found in columns and messages; files, contents, Pillow images
placeholders.py            as many tokens as stand for each
media.py             what images of prompts do not go with
families.py           which models read images: a declaration for each family
patch_grids.py              pictures as grids of patches (Qwen-VL and its like), and their positions
kimi.py               those of Kimi K2.5, whose positions are those of text
tiling.py, llama4_canvas.py   pictures as tiles of one size (Gemma 3, InternVL, Llama 4)
video_reader.py              videos as files: times and frames (PyAV)
image_reader.py           images in files (Pillow)
video_settings.py     which frames of a video, at which size, with which values
pixels.py             pixels, made once: what all image processors have in common
vl_model.py              the vision side of a loaded model: what all families have in common
inputs.py             what the core finds of all this
probe.py              a loaded model on packed prompts with images, compared with its own forward pass
"""
