"""Images and videos: what rows and tools give, put into token ids and into the forward pass of a model.

families.py          Families of models that read images
image_reader.py      Pictures in files, with Pillow
inputs.py            The media side of a model folder, and of a model that was loaded from it
kimi.py              Images of Kimi K2.5
llama4_canvas.py     Images of Llama 4
patch_grids.py       Models that read a picture as a grid of patches of its own shape
pixels.py            Images and videos into the pixels that a vision tower takes
placeholders.py      Images and videos in token ids
probe.py             A vision-language model on packed prompts with images, compared with its own forward pass on each
                     alone
sources.py           Images and videos as rows and tools give them
tiling.py            Models that read a picture as square tiles of one size, each with as many tokens
video_reader.py      Videos as files
video_settings.py    Video settings of models of the Qwen-VL family
vl_model.py          Inputs of a vision-language model beside token ids, as far as all families have them in common
"""
