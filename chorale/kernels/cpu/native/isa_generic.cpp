#define CHORALE_ISA "isa/generic.h"
#define CHORALE_TABLE table_generic
#include "kernels.inc"
