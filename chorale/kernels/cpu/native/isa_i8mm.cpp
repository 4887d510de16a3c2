#define CHORALE_ISA "isa/neon.h"
#define CHORALE_TABLE table_i8mm
#include "kernels.inc"
