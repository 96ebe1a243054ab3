/* Prints where a release of Python keeps what `record/native/observer/calls.cpp` reads of its frames: a row of LAYOUTS, and
   below it what that source takes for the same in all releases. `tools/python_offsets.py` compiles and runs it. */
#define Py_BUILD_CORE 1
#include <Python.h>

#if PY_VERSION_HEX >= 0x030e0000
#include "internal/pycore_interpframe_structs.h"
#else
#include "internal/pycore_frame.h"
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define AT(type, field) ((int)offsetof(type, field))

#if PY_VERSION_HEX >= 0x030d0000
enum { STATE = AT(PyThreadState, current_frame), CFRAME = -1 };
enum { CODE = AT(_PyInterpreterFrame, f_executable), INSTRUCTION = AT(_PyInterpreterFrame, instr_ptr) };
#else
enum { STATE = AT(PyThreadState, cframe), CFRAME = AT(_PyCFrame, current_frame) };
enum { CODE = AT(_PyInterpreterFrame, f_code), INSTRUCTION = AT(_PyInterpreterFrame, prev_instr) };
#endif

#if PY_VERSION_HEX >= 0x030c0000
enum { VERSION = AT(PyCodeObject, co_version) };
#else
enum { VERSION = -1 }; /* it is given anew when a function is specialised */
#endif

static uint32_t state_of(const PyASCIIObject* text) {
  uint32_t state;
  memcpy(&state, &text->state, sizeof state);
  return state;
}

int main(void) {
  PyASCIIObject kind, ascii;
  memset(&kind, 0, sizeof kind);
  memset(&ascii, 0, sizeof ascii);
  kind.state.kind = 7;
  ascii.state.ascii = 1;
  printf("{%d, %d, %d, %d, %d, %d, %d, %d, ", PY_MINOR_VERSION, STATE, CFRAME, CODE, AT(_PyInterpreterFrame, previous), INSTRUCTION,
         AT(_PyInterpreterFrame, owner), AT(_PyInterpreterFrame, localsplus));
  printf("%d, %d, %d, %d, %d, %d, %d}\n", AT(PyCodeObject, co_filename), AT(PyCodeObject, co_qualname), AT(PyCodeObject, co_firstlineno),
         AT(PyCodeObject, co_linetable), AT(PyCodeObject, co_code_adaptive), (int)sizeof(PyASCIIObject), VERSION);
  printf("length %d state %d kind %#x ascii %#x compact %d type %d name %d size %d bytes %d\n", AT(PyASCIIObject, length),
         AT(PyASCIIObject, state), state_of(&kind), state_of(&ascii), (int)sizeof(PyCompactUnicodeObject), AT(PyObject, ob_type),
         AT(PyTypeObject, tp_name), AT(PyVarObject, ob_size), AT(PyBytesObject, ob_sval));
  return 0;
}
