"""What processes say to each other (`worker.proto`) and services to a gateway (`inference.proto`), with the code generated
from both (`make proto`)."""
