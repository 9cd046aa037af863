"""Images: samples from image files, and models of images: CLIP and a masked autoencoder. Needs the extra `image`."""
